"""A model for vLLM-MLX whose rows are hashes (mlx_rows.py), on the caches and
masks of mlx-lm."""

import numpy as np
from mlx_lm.models import cache
from mlx_lm.models.base import create_attention_mask, create_ssm_mask
from mlx_rows import Rows, caches_of


class Model(Rows):
    attention_mask = staticmethod(create_attention_mask)
    state_mask = staticmethod(create_ssm_mask)

    def make_cache(self):
        return caches_of(self.setup, cache)

    def __call__(self, inputs, cache):
        return self.logits(np.array(inputs), cache)
