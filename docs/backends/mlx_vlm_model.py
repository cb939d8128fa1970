"""A model for mlx-vlm whose rows are hashes (mlx_rows.py), on the caches and
masks of mlx-vlm. Images are part of the embeddings: the same tokens have other
rows with another image."""

import types

import mlx.core as mx
import numpy as np
from mlx_rows import Rows, caches_of
from mlx_vlm.models import cache
from mlx_vlm.models.base import (InputEmbeddingsFeatures, LanguageModelOutput,
                                 create_attention_mask, create_ssm_mask,
                                 dequantize_kv_state)

IMAGE = 1  # The token of an image.
IMAGES = 64  # A token of image i is embedded as IMAGE + IMAGES * i.


def embedded(model, tokens, pixels=None):
    """Returns the arguments that a model makes of a prompt."""
    made = model.get_input_embeddings(tokens, pixels).to_dict()
    return {key: value for key, value in made.items() if value is not None}


class Model(Rows):
    attention_mask = staticmethod(create_attention_mask)
    state_mask = staticmethod(create_ssm_mask)
    config = types.SimpleNamespace(
        image_token_id=IMAGE, model_type="hashes", eos_token_id=None)

    def __init__(self, setup):
        super().__init__(setup)
        self.language_model, self.layers = self, setup.layers

    @staticmethod
    def plain(cache, keys, values):
        return dequantize_kv_state(cache, keys, values)

    def get_input_embeddings(self, input_ids, pixel_values=None, **kwargs):
        """Returns embeddings: the token, and the number of the image."""
        values = np.array(input_ids)
        images = np.flatnonzero(values[0] == IMAGE)
        if pixel_values is not None:
            values[0, images] += IMAGES * np.array(pixel_values)
        return InputEmbeddingsFeatures(mx.array(values, mx.float32)[..., None])

    def __call__(self, inputs, inputs_embeds=None, cache=None, **kwargs):
        tokens = np.array(inputs)
        values = tokens
        if inputs_embeds is not None:
            values = np.array(inputs_embeds[..., 0]).astype(np.int64)
            if (values % IMAGES != tokens).any():
                self.wrong.append("embeddings of other tokens")
        return LanguageModelOutput(self.logits(tokens, cache, values))


class Mixed(Model):
    """Has other layers than those that mlx-vlm makes by itself."""

    def make_cache(self):
        return caches_of(self.setup, cache)
