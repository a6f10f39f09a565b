"""Which calls of the user's functions a backward is taken to make."""

from foregrad.record.hooks import _goes_on


def waiting():
    yield 1
    yield 2


def test_a_generator_that_goes_on_was_seen_when_it_began():
    """Or it is garbage, which Python closes wherever it is collected, in the middle of a backward too."""
    generator = waiting()
    assert not _goes_on(generator.gi_frame)
    next(generator)
    assert _goes_on(generator.gi_frame)
