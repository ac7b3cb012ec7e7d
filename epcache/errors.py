"""What epcache raises for a user's mistake or a machine's trouble.

Every message is one line and says what failed, the value, what was expected and what to do. Each
class is also the standard exception that fits, so library users need not import these.
"""


class EpcacheError(Exception):
    """Base of all errors whose message is meant for the user."""


class ConfigError(EpcacheError, ValueError):
    """An option or argument has a value that cannot work."""


class DataError(EpcacheError, ValueError):
    """A data set is not what its manifest says."""


class WeightsError(EpcacheError, ValueError):
    """Weights cannot be had or do not fit the backbone."""


class StoreError(EpcacheError, RuntimeError):
    """A store is missing, unsealed, damaged, busy or another one than asked for."""


class NumericError(EpcacheError, ArithmeticError):
    """Tokens are not finite or do not fit the stored type."""


class SpaceError(EpcacheError, OSError):
    """The disk is full or would be."""
