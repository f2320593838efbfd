"""The names of things on the Hugging Face hub, and its errors in one sentence."""

from diloco.errors import DataError, SourceUnavailable

PREFIX = "hf:"
HUB_SECONDS = 15.0


def hub_error(subject: str, error: Exception, hint: str = "") -> DataError:
    """Put an error of the hub's libraries into one sentence with a remedy. They share no base class: matched by
    name."""
    if isinstance(error, DataError):
        return error
    names = {kind.__name__ for kind in type(error).__mro__}
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    if "GatedRepoError" in names:
        return DataError(f"{subject} is gated: accept its conditions on its page on the hub, then `hf auth login`")
    if names & {"RepositoryNotFoundError", "DatasetNotFoundError", "RevisionNotFoundError", "HFValidationError"}:
        return DataError(f"{subject}: there is no such name on the hub, or it is private: check it, or `hf auth login`")
    if "OfflineModeIsEnabled" in names:
        return SourceUnavailable(f"{subject}: offline mode is on: unset HF_HUB_OFFLINE, or give a local folder")
    if names & {"TransportError", "RequestException", "ConnectionError", "TimeoutError", "HfHubHTTPError", "HTTPError"}:
        return SourceUnavailable(
            f"{subject} cannot be reached: {reason}; check the network and HF_ENDPOINT, or fetch it on another machine "
            "and give the folder"
        )
    return DataError(f"{subject} cannot be read: {reason.rstrip('.')}{hint}")
