"""What a cache is to be, and what a backend says that it can do."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

#: As the end of a range: everything from its begin on.
OPEN_END = 2147483647

Kind = Literal["causal", "swa", "swa_mem", "chunked", "encoder", "wrapper"]
Placement = Literal["contiguous", "scatter"]
ShiftKind = Literal["none", "identity", "add", "tag_add", "rope"]
VLayout = Literal["plain", "permuted", "tiled"]
DType = Literal["f32", "f16", "bf16", "f8_e4m3", "q8_0", "q4_0"]
MaskDType = Literal["f32", "f16", "bf16", "bits"]
Level = Literal["identity", "visibility", "numeric"]
Ability = Literal[
    "remove_tail",
    "remove_middle",
    "copy_prefix",
    "share",
    "reserve",
    "mix",
    "any_order",
    "refuse_misuse",
    "any_sequence",
    "mix_dtypes",
]

KINDS = ("causal", "swa", "swa_mem", "chunked", "encoder", "wrapper")
DTYPES = ("f32", "f16", "bf16", "f8_e4m3", "q8_0", "q4_0")
MASK_DTYPES = ("f32", "f16", "bf16", "bits")
V_LAYOUTS = ("plain", "permuted", "tiled")
SHIFTS = ("none", "identity", "add", "tag_add", "rope")
LEVELS = ("numeric", "visibility", "identity")
# Their bits, KVTWIN_CAN_... in include/kvtwin/kvtwin.h.
ABILITIES = {
    "remove_tail": 0,
    "remove_middle": 1,
    "copy_prefix": 2,
    "share": 3,
    "reserve": 4,
    "mix": 5,
    "any_order": 6,
    "refuse_misuse": 7,
    "any_sequence": 10,
    "mix_dtypes": 11,
}
POOL_ABILITIES = ("deduplicates", "recomputes_last")
CANNOT = ("window_0", "copy_to_itself", "undo_remove")
PLACEMENTS = ("contiguous", "scatter")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding, for the shift `rope` (include/kvtwin/shift.h)."""

    #: Pairs are (i, i + dims / 2) instead of (2i, 2i + 1).
    halves: bool = False
    base: float = 10000.0
    scale: float = 1.0
    #: Elements of a head that rotate, even; 0: all.
    dims: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What a cache is made of. Fields that a kind does not use are ignored.

    `window`, `memory`, `capacity` are in positions, `max_batch` in tokens.
    """

    kind: Kind = "causal"
    #: How a batch gets its cells (docs/semantics.md, S9, S10).
    placement: Placement = "contiguous"
    #: Of `swa` and `swa_mem`. None: unbounded.
    window: int | None = None
    #: Of `swa_mem`. None: the window.
    memory: int | None = None
    #: Of `chunked`.
    chunk: int = 0
    #: How K rows change when their positions do.
    shift: ShiftKind = "none"
    rope: Rope = Rope()
    #: Of `wrapper`: what is wrapped.
    caches: tuple[Setup, ...] = ()

    #: Views begin and end at multiples of this.
    cache_padding: int = 1
    #: Mask rows are rounded up to this.
    mask_batch_padding: int = 1
    v_layout: VLayout = "plain"
    mask_dtype: MaskDType = "f32"

    #: Of the stored rows.
    dtype: DType = "f32"
    #: Of the stored V rows. None: as `dtype`.
    v_dtype: DType | None = None
    max_sequences: int = 1
    #: Tokens of each sequence.
    capacity: int = 1024
    #: Tokens of one forward pass, at most.
    max_batch: int = 512

    #: Of the model. `kvtwin.Cache` learns them from the first `put`.
    layers: int = 1
    kv_heads: int = 1
    k_head_dim: int = 1
    v_head_dim: int = 1

    def __post_init__(self) -> None:
        """Refuses an unknown name here, and not where the cache is made."""
        _known("kind", [self.kind], KINDS)
        _known("placement", [self.placement], PLACEMENTS)
        _known("shift", [self.shift], SHIFTS)
        _known("v_layout", [self.v_layout], V_LAYOUTS)
        _known("mask_dtype", [self.mask_dtype], MASK_DTYPES)
        _known("dtype", [self.dtype], DTYPES)
        if self.v_dtype is not None:
            _known("v_dtype", [self.v_dtype], DTYPES)


def _known(what: str, names: Iterable[str], due: Iterable[str]) -> None:
    for name in names:
        if name not in due:
            raise ValueError(f"{what}: {name!r} is none of {', '.join(due)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSetup:
    """What a pool of blocks is made of (include/kvtwin/paged.h)."""

    #: Tokens of a block, and blocks in all.
    block_size: int
    blocks: int
    #: Tokens of one sequence, at most.
    max_seq_len: int
    layers: int
    kv_heads: int
    k_head_dim: int
    v_head_dim: int
    #: Of the stored rows, and of those of V.
    dtype: DType
    v_dtype: DType
    #: How the rows of a block lie in memory, which views do not show.
    layout: Literal["token_major", "head_major"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolDescription:
    """What a pool of blocks says of itself. It is held to visibility: what a prompt
    finds, which blocks are taken and when the pool is full are its own affair. The
    methods that it does not have are never called.

    Abilities: `deduplicates` (a `commit` may swap whole blocks of the sequence for
    others of the same tokens under the same key), `recomputes_last` (`open` may find a
    prompt of whole blocks but for its last token, which is appended next, in the block
    where it was found).
    """

    name: str
    can: frozenset[str] | set[str] = frozenset()
    #: Positions before its own that a token sees; what no later token sees may be
    #: gone, and views begin behind it. None: all.
    window: int | None = None

    def __post_init__(self) -> None:
        _known("can", self.can, POOL_ABILITIES)
        if self.window is not None and not 0 <= self.window < 2**31:
            raise ValueError(f"window is {self.window}, it must be from 0 to 2147483647")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """What a backend says of itself: what it does not say that it has or can do
    is never asked of it.

    Abilities: `remove_tail` (`remove` up to the open end), `remove_middle` (any
    `remove`), `copy_prefix`, `share` (copy a prefix that is not all of it),
    `reserve` (`start_forward` with `reserve=True`), `mix` (several sequences in
    one batch), `any_order` (positions with gaps, that go back or repeat),
    `refuse_misuse` (wrong arguments are a ValueError, calls out of order a
    RuntimeError, and both change nothing), `any_sequence` (sequences of any number,
    else of 0 to max_sequences - 1), `mix_dtypes` (V of another dtype than K).

    What most have, and this one `cannot`: `window_0` (windows have 1 position or
    more then), `copy_to_itself`, `undo_remove` (a `remove` that is refused may leave
    a part of the sequence, which is then removed as a whole before anything else).
    """

    name: str
    #: Whose rules it follows: one of `kvtwin profile --list`, perhaps with exceptions:
    #: "llama.cpp except copy replaces, middle removal shifts".
    profile: str = "ollama-0.15"
    #: What it is held to at most. `identity` also takes the methods `cells`,
    #: `batch_cells` and `cell_count`.
    level: Level = "visibility"
    kinds: frozenset[str] | set[str] = frozenset({"causal"})
    can: frozenset[str] | set[str] = frozenset()
    dtypes: frozenset[str] | set[str] = frozenset({"f32"})
    v_layouts: frozenset[str] | set[str] = frozenset({"plain"})
    shifts: frozenset[str] | set[str] = frozenset({"none"})
    #: 0: any number.
    max_sequences: int = 1
    #: 0: any number.
    max_layers: int = 0
    #: The largest cache or mask padding. 0: any.
    max_padding: int = 1
    #: The largest mask padding. 0: max_padding, which then is that of both.
    max_mask_padding: int = 0
    #: The largest position of a token. 0: any.
    max_position: int = 0
    placements: frozenset[str] | set[str] = frozenset(PLACEMENTS)
    cannot: frozenset[str] | set[str] = frozenset()
    #: Of the level `numeric`: the largest error of an element of attention.
    tolerance: float = 0.01

    def __post_init__(self) -> None:
        if self.level == "entitlement":  # Its name before.
            object.__setattr__(self, "level", "visibility")
        _known("level", [self.level], LEVELS)
        _known("kinds", self.kinds, KINDS)
        _known("can", self.can, ABILITIES)
        _known("cannot", self.cannot, CANNOT)
        _known("placements", self.placements, PLACEMENTS)
        _known("dtypes", self.dtypes, DTYPES)
        _known("v_layouts", self.v_layouts, V_LAYOUTS)
        _known("shifts", self.shifts, SHIFTS)
