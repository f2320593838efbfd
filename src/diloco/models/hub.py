"""A model of the Hugging Face hub as a folder on this machine: downloaded once, afterwards found without a network.

Imports no torch. Downloads safetensors and text files only: never pickled weights, never code. Every problem (no
network, no such model, a gated one) is one ConfigError.
"""

from pathlib import Path

from diloco.errors import ConfigError

_SMALL = ["*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
_WEIGHTS = ["model*.safetensors"]  # not the copies that some repositories keep for other programs
_NO_ANSWER_SECONDS = 10.0


def cached_folder(name: str) -> Path | None:
    """The cached folder of `owner/name`, perhaps incomplete; None if there is none. Uses no network."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True, allow_patterns=["config.json"]))
    except (OSError, ValueError):  # not there, or not a valid name
        return None


def hub_folder(name: str, *, weights: bool) -> Path:
    """The folder of `owner/name`; without `weights` only configuration and tokenizer are fetched."""
    from huggingface_hub import errors, snapshot_download

    patterns = _SMALL + (_WEIGHTS if weights else [])
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, etag_timeout=_NO_ANSWER_SECONDS))
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"model 'hf:{name}' is gated on the Hugging Face hub: accept its conditions at "
            f"https://huggingface.co/{name} and log in (huggingface-cli login), or give the path of a folder"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ConfigError(
            f"model 'hf:{name}': the Hugging Face hub has no such model, or it is private, and there is no such "
            f"folder; check the name, or log in (huggingface-cli login)"
        ) from error
    except Exception as error:  # the hub's library passes on any error of its HTTP library
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"model 'hf:{name}' cannot be fetched from the Hugging Face hub ({reason}), and it is neither a folder nor "
            f"in the hub's cache here: check the network, or give hf:PATH of a downloaded folder"
        ) from error
