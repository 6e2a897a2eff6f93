"""What is raised where an artifact or a document does not hold what it should."""


class MalformedError(ValueError):
    """An artifact does not hold what it should; the message says what is wrong."""
