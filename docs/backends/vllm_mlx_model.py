"""A model for vLLM-MLX whose rows are hashes (mlx_rows.py), on the caches and
masks of mlx-lm."""

import numpy as np
from mlx_lm.models.base import create_attention_mask, create_ssm_mask
from mlx_lm.models.cache import (ArraysCache, CacheList, KVCache,
                                 RotatingKVCache)
from mlx_rows import Rows


class Model(Rows):
    attention_mask = staticmethod(create_attention_mask)
    state_mask = staticmethod(create_ssm_mask)

    def make_cache(self):
        window = self.setup.window
        return [{"full": KVCache, "state": lambda: ArraysCache(1),
                 "window": lambda: RotatingKVCache(window),
                 "list": lambda: CacheList(KVCache(), KVCache())}[kind]()
                for kind in self.setup.layers]

    def __call__(self, inputs, cache):
        return self.logits(np.array(inputs), cache)
