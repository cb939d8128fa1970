"""The setup of a cache or a pool, and the description of a backend."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable
from typing import Literal, get_args

#: As the parent of a batch token: it is an ordinary token, or a draft that follows the
#: committed tokens of its sequence.
NOT_A_DRAFT = -2
COMMITTED = -1
#: The end of a range that includes everything from its begin on.
OPEN_END = 2147483647

Kind = Literal[
    "causal",
    "swa",
    "swa_mem",
    "chunked",
    "encoder",
    "wrapper",
    "recurrent",
    "hybrid",
]
Placement = Literal["contiguous", "scatter"]
ShiftKind = Literal["none", "identity", "add", "tag_add", "rope"]
VLayout = Literal["plain", "permuted", "tiled"]
DType = Literal["f32", "f16", "bf16", "f8_e4m3", "q8_0", "q4_0"]
MaskDType = Literal["f32", "f16", "bf16", "bits"]
# "entitlement" is the name that "visibility" had before.
Level = Literal["identity", "visibility", "numeric", "attention", "entitlement"]
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
    "soft_cap",
    "sinks",
    "draft",
    "draft_trees",
    "find_prefix",
    "draft_states",
    "pin",
    "refuse_full",
]

KINDS = get_args(Kind)
DTYPES = get_args(DType)
MASK_DTYPES = get_args(MaskDType)
V_LAYOUTS = get_args(VLayout)
SHIFTS = get_args(ShiftKind)
LEVELS = ("numeric", "visibility", "identity", "attention")
# The bit of each ability, KVTWIN_CAN_... in include/kvtwin/kvtwin.h.
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
    "soft_cap": 12,
    "sinks": 13,
    "draft": 14,
    "draft_trees": 15,
    "find_prefix": 16,
    "draft_states": 17,
    "pin": 18,
    "refuse_full": 19,
}
# The same for KVTWIN_POOL_... in include/kvtwin/pool_backend.h.
POOL_ABILITIES = {
    "deduplicates": 0,
    "recomputes_last": 1,
    "groups": 3,
    "media": 4,
    "states_in_place": 5,
    "one_stock": 6,
    "soft_cap": 7,
    "sinks": 8,
    "no_reserve": 9,
}
POOL_HAS_WINDOW = 1 << 2
CANNOT = ("window_0", "copy_to_itself", "undo_remove", "bound_memory")
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
    """The setup of a cache. Fields that a kind does not use are ignored.

    `window`, `memory`, `capacity` are in positions, `max_batch` in tokens.
    """

    kind: Kind = "causal"
    #: How a batch finds its cells (docs/semantics.md, S9, S10).
    placement: Placement = "contiguous"
    #: For `swa` and `swa_mem`. None: unbounded.
    window: int | None = None
    #: For `swa_mem`. None: the same as the window.
    memory: int | None = None
    #: For `chunked`.
    chunk: int = 0
    #: For `recurrent`: a sequence keeps its last `checkpoints` states after a multiple
    #: of `checkpoint_every` tokens. 0: none.
    checkpoint_every: int = 0
    checkpoints: int = 0
    #: For `recurrent`: how many states `checkpoint` keeps pinned, and how many drafts
    #: have room.
    pins: int = 0
    drafts: int = 0
    #: How K rows change when their positions change.
    shift: ShiftKind = "none"
    rope: Rope = Rope()
    #: For `wrapper` and `hybrid`: the caches in it.
    caches: tuple[Setup, ...] = ()

    #: Views begin and end at multiples of this.
    cache_padding: int = 1
    #: Mask rows are rounded up to this.
    mask_batch_padding: int = 1
    v_layout: VLayout = "plain"
    mask_dtype: MaskDType = "f32"

    #: The dtype of the stored K rows.
    dtype: DType = "f32"
    #: The dtype of the stored V rows. None: the same as `dtype`.
    v_dtype: DType | None = None
    max_sequences: int = 1
    #: Positions of each sequence.
    capacity: int = 1024
    #: The most tokens of one forward pass.
    max_batch: int = 512

    #: The dimensions of the model. `kvtwin.Cache` learns them from the first `put`.
    layers: int = 1
    kv_heads: int = 1
    k_head_dim: int = 1
    v_head_dim: int = 1

    #: For the `attend` of a backend: a scaled score s becomes
    #: soft_cap * tanh(s / soft_cap). 0: none.
    soft_cap: float = 0
    #: For each query head, the logit of a token without V. Empty: none.
    sinks: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuses an unknown name here, before a cache is made."""
        _known("kind", [self.kind], KINDS)
        _known("placement", [self.placement], PLACEMENTS)
        _known("shift", [self.shift], SHIFTS)
        _known("v_layout", [self.v_layout], V_LAYOUTS)
        _known("mask_dtype", [self.mask_dtype], MASK_DTYPES)
        _known("dtype", [self.dtype], DTYPES)
        if self.v_dtype is not None:
            _known("v_dtype", [self.v_dtype], DTYPES)


def _known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{what}: {name!r} is not one of {', '.join(known)}")


def _freeze(description: Description | PoolDescription, name: str, known: Iterable[str]) -> None:
    """Makes the field a frozenset, so that each name counts once, and no name is added
    after this check. Raises ValueError for an unknown name."""
    given = getattr(description, name)
    names = frozenset([given] if isinstance(given, str) else given)
    _known(name, sorted(names, key=str), known)
    object.__setattr__(description, name, names)


def _check_limits(description: Description | PoolDescription, *names: str) -> None:
    """Raises ValueError unless each field is an int from 0 to 2147483647."""
    for name in names:
        value = getattr(description, name)
        if not (isinstance(value, numbers.Integral) and 0 <= int(value) < 2**31):
            raise ValueError(f"{name} is {value!r}, it must be an int from 0 to 2147483647")


def _check_tolerance(description: Description | PoolDescription, name: str) -> None:
    """Raises ValueError unless the field is a finite number, 0 or more."""
    value = getattr(description, name)
    if not (isinstance(value, numbers.Real) and 0 <= float(value) < math.inf):
        raise ValueError(f"{name} is {value!r}, it must be finite, 0 or more")


def _check_attention(description: Description | PoolDescription) -> None:
    """Raises ValueError unless the fields for `attend` are valid."""
    _known("attend_dtype", [description.attend_dtype], ("f32", "f16", "bf16"))
    _check_limits(description, "max_query_heads")
    _check_tolerance(description, "attend_tolerance")


def _check_texts(description: Description | PoolDescription, *names: str) -> None:
    """Raises ValueError unless each field is a str."""
    for name in names:
        value = getattr(description, name)
        if not isinstance(value, str):
            raise ValueError(f"{name} is {value!r}, it must be a str")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSetup:
    """The setup of a pool of blocks (include/kvtwin/paged.h)."""

    #: The number of tokens in a block, and of blocks.
    block_size: int = 16
    blocks: int = 1
    #: The most tokens of one sequence.
    max_seq_len: int = 1
    layers: int = 1
    kv_heads: int = 1
    k_head_dim: int = 1
    v_head_dim: int = 1
    #: The dtypes of the stored K rows and V rows.
    dtype: DType = "f32"
    v_dtype: DType = "f32"
    #: The order of a block's rows in memory, which views do not show.
    layout: Literal["token_major", "head_major"] = "token_major"
    #: How many positions before its own a token sees. None: all.
    window: int | None = None
    #: A block has one row, the state after its tokens, in place of a row of each.
    states: bool = False
    #: Groups of layers, each with blocks of its own (docs/hybrid.md). Layers are
    #: numbered through all groups. With groups, `max_seq_len` is the only
    #: other field that counts for a new pool, and it counts for all of them; a class
    #: gets `blocks` and `layers` of all groups, and as `block_size` the least common
    #: multiple of the block sizes.
    groups: tuple[PoolSetup, ...] = ()

    def group_of(self, layer: int) -> int:
        """Returns the number of the group of a layer; 0 without groups."""
        end = 0
        for group, setup in enumerate(self.groups):
            end += setup.layers
            if layer < end:
                return group
        if self.groups:
            raise ValueError(f"layer is {layer}, the groups have {end} layers")
        return 0

    def of_layer(self, layer: int) -> PoolSetup:
        """Returns the setup of the group of a layer; this setup without groups."""
        return self.groups[self.group_of(layer)] if self.groups else self


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolDescription:
    """The description of a pool of blocks. The pool is held to visibility: it decides
    what a prompt finds, which blocks are taken and when it is full. Methods that it
    does not have are never called.

    Abilities: `deduplicates` (a `commit` may swap whole blocks of the sequence for
    other blocks of the same tokens under the same key), `recomputes_last` (`open` may
    find all of a prompt of whole blocks except its last token, which is appended next,
    in the block where it was found), `groups` (the setup has `groups`; a class that
    declares it gets no other setups), `media` (prompts may have images: `open` gets
    `media`, and there is a method `add_media`), `states_in_place` (in groups with
    states, a pass may write over the state that it reads; a pass is then committed as a
    whole, or its sequence is freed), `one_stock` (all groups take their blocks from one
    stock, so that a block is in one group at a time), `no_reserve` (a sequence holds no
    more blocks than its tokens and appended rows took while it had the most of them:
    `usage` counts no others as used), `soft_cap` and `sinks` (`attend`
    gets an argument of this name: the cap of the scaled scores, or 0, and a float32
    array with a logit for each query head, or None).
    """

    name: str
    can: frozenset[str] | set[str] = frozenset()
    #: How many positions before its own a token sees. Rows that no later token sees
    #: may be gone, and views begin after them. None: all.
    window: int | None = None
    #: For `attend`, as in `Description`.
    attend_dtype: str = "f32"
    max_query_heads: int = 0
    attend_tolerance: float = 0
    #: The dtypes of rows that the class stores. Empty: any.
    dtypes: frozenset[str] | set[str] = frozenset()
    #: `block_size` is a multiple of the first, and both head_dims are multiples of the
    #: second. 0: any number.
    block_multiple: int = 0
    head_dim_multiple: int = 0
    #: Sequences that may be open at a time. 0: six. Histories never have more than 72.
    max_sequences: int = 0

    def __post_init__(self) -> None:
        _check_texts(self, "name")
        _freeze(self, "can", POOL_ABILITIES)
        _freeze(self, "dtypes", DTYPES)
        _check_limits(self, "block_multiple", "head_dim_multiple", "max_sequences")
        _check_attention(self)
        for ability in ("states_in_place", "one_stock"):
            if ability in self.can and "groups" not in self.can:
                raise ValueError(f"{ability} is for pools with groups")
        if self.window is not None:
            _check_limits(self, "window")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """The description of a backend. Operations and settings that it does not declare
    are never used on it.

    Abilities: `remove_tail` (`remove` up to the open end), `remove_middle` (any
    `remove`), `copy_prefix`, `share` (copy a prefix that is not the whole sequence),
    `reserve` (`start_forward` with `reserve=True`), `mix` (several sequences in
    one batch), `any_order` (positions with gaps, that go back or repeat),
    `refuse_misuse` (wrong arguments raise ValueError, calls out of order raise
    RuntimeError, and both change nothing), `refuse_full` (some batches do not fit: after
    CacheFull, nothing of the batch is stored), `any_sequence` (any sequence number; without
    it 0 to max_sequences - 1), `mix_dtypes` (V has another dtype than K), `soft_cap`
    and `sinks` (`attend` follows those of the setup), `draft` (`start_forward` with
    `parents`, each draft after the draft before it, and `commit`), `draft_trees` (the
    same, and a draft may follow any draft), `draft_states` (recurrent and hybrid caches
    have drafts, too: as many as `drafts` of the setup says), `pin` (`checkpoint` pins
    the last state of a sequence; the last `pins` of the setup stay), `find_prefix`
    (`find_prefix` is called with the prompt of a new sequence, and says how many of its
    first tokens the sequence has already).

    `cannot` lists what most backends can do and this one cannot: `window_0` (without
    it, windows have at least 1 position), `copy_to_itself`, `undo_remove` (a refused
    `remove` may leave a part of the sequence, and the whole sequence is then removed
    before anything else), `bound_memory` (without it, the memory of a `swa_mem` is at
    least the capacity).
    """

    name: str
    #: The profile that it follows: one of `kvtwin profile --list`, perhaps with
    #: exceptions: "llama.cpp except copy replaces, middle removal shifts".
    profile: str = "ollama-0.15"
    #: The strongest level that it is held to. `identity` also needs the methods
    #: `cells`, `batch_cells` and `cell_count`; `attention` needs `attend`, and is the
    #: only level without `get`.
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
    #: The largest mask padding. 0: max_padding, which then bounds both paddings.
    max_mask_padding: int = 0
    #: The largest position of a token. 0: any.
    max_position: int = 0
    placements: frozenset[str] | set[str] = frozenset(PLACEMENTS)
    cannot: frozenset[str] | set[str] = frozenset()
    #: For the level `numeric`: the largest error of an element of attention.
    tolerance: float = 0.01
    #: For `attend`: f32, or the dtype f16 or bf16 to which queries, scores, weights or
    #: outputs are rounded.
    attend_dtype: str = "f32"
    #: For `attend`: the largest number of query heads for each KV head. 0: any.
    max_query_heads: int = 0
    #: For `attend`: the error of the cache's own number formats, which is added to
    #: the bound of rounding.
    attend_tolerance: float = 0

    def __post_init__(self) -> None:
        if self.level == "entitlement":  # The old name.
            object.__setattr__(self, "level", "visibility")
        _check_texts(self, "name", "profile")
        _known("level", [self.level], LEVELS)
        _freeze(self, "kinds", KINDS)
        _freeze(self, "can", ABILITIES)
        if "share" in self.can and "copy_prefix" not in self.can:
            raise ValueError("the ability share needs the ability copy_prefix")
        _freeze(self, "cannot", CANNOT)
        _freeze(self, "placements", PLACEMENTS)
        _freeze(self, "dtypes", DTYPES)
        _freeze(self, "v_layouts", V_LAYOUTS)
        _freeze(self, "shifts", SHIFTS)
        _check_limits(self, "max_sequences", "max_layers", "max_padding", "max_mask_padding")
        _check_limits(self, "max_position")
        _check_tolerance(self, "tolerance")
        _check_attention(self)
