"""What decoders say, in the words of those who wrote what they could not read."""

from carpool_core.resources.schema import describe_decode_error


def test_a_decoder_without_a_place():
    assert describe_decode_error("Expected `object`, got `int`") == "expected a mapping, got a whole number"
