"""A saved model as a source of features, for shards that are clusters (data/preparation/partitions.py).

Paper (DiLoCo, section 3): documents are grouped by the last layer of a pre-trained model. The feature of a passage is
the mean of the last hidden layer, after its norm, over its first tokens.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from diloco.data.preparation.partitions import FeatureModel
from diloco.data.tokenizer import Tokenizer
from diloco.errors import ConfigError, DataError
from diloco.models.native.model import load_model
from diloco.models.native.transformer import Transformer

LOOK_AT_TOKENS = 128
AT_ONCE = 32


def feature_model(folder: Path, device: torch.device | str = "cpu") -> FeatureModel:
    """Return the model of a folder and its own tokenizer."""
    try:
        model: Transformer = load_model(folder)
    except ConfigError as error:
        raise DataError(f"data.feature_model {str(folder)!r} cannot be used: {error}") from error
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise DataError(
            f"data.feature_model {str(folder)!r}: its tokenizer has {tokenizer.vocab_size} tokens, but the model has "
            f"vectors for {model.config.vocab_size}"
        )
    decoder = model.model.to(device).eval()

    @torch.no_grad()
    def features(tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Map [n, T] tokens, −1 after the end, to [n, D]. The model is causal: the padding changes nothing before
        it."""
        parts: list[NDArray[np.float32]] = []
        for start in range(0, len(tokens), AT_ONCE):
            part = torch.from_numpy(tokens[start : start + AT_ONCE]).to(device)
            inside = (part >= 0).unsqueeze(-1)
            hidden = decoder(part.clamp(min=0)).float()
            parts.append(((hidden * inside).sum(1) / inside.sum(1)).cpu().numpy())
        return np.concatenate(parts)

    return FeatureModel(tokenizer, min(LOOK_AT_TOKENS, model.config.max_sequence_length), features)
