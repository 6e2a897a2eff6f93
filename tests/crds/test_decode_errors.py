"""What decoders say, in the words of those who wrote what they could not read."""

from carpool_core.decode_errors import in_words


def test_a_decoder_without_a_place():
    assert in_words("Expected `object`, got `int`") == "expected a mapping, got a whole number"
