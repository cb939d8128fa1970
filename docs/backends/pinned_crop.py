"""DynamicCache and its way back, in releases whose crop takes a length and in
those whose crop takes a number of tokens, for pinned.py."""

import inspect

import pipe as kvtwin
from transformers_caches import Dynamic, SlidingRecorded


class Cropped(Dynamic):
    kvtwin = kvtwin.Description(
        name="DynamicCache, cropped to any length", kinds={"causal"},
        can={"remove_tail"})

    def remove(self, sequence, begin, end):
        form = inspect.signature(self.cache.layers[0].crop).parameters
        removes = "tokens_to_remove" in form  # Otherwise the new length.
        self.cache.crop(begin - self.length() if removes else begin)


class Recorded(SlidingRecorded):
    """A conversation that begins anew has a new cache."""
    kvtwin = SlidingRecorded.kvtwin

    def remove(self, sequence, begin, end):
        if begin == 0:
            self.cache = self.make()
        else:
            super().remove(sequence, begin, end)
