"""The sweeps are not even collected unless asked for: torch's database of operators takes seconds to import."""


def pytest_ignore_collect(config):
    return True if config.option.markexpr == "not sweep" else None
