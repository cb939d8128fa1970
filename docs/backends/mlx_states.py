"""Whole models of mlx-lm in batches, as generate.BatchGenerator has them, under kvtwin's
oracle: docs/backends/mlx.md."""

import mlx.core as mx
import numpy
import pipe as kvtwin
from mlx.utils import tree_map
from mlx_caches import Batch
from mlx_lm.utils import _get_classes

NUMBERS = dict(  # Each model takes those that it knows.
    hidden_size=32, num_hidden_layers=2, num_layers=1, num_attention_heads=2,
    num_key_value_heads=2, num_heads=2, head_dim=16, intermediate_size=32,
    vocab_size=64, rms_norm_eps=1e-5, norm_eps=1e-5, rope_theta=1e4,
    max_position_embeddings=64, attention_bias=False, mlp_bias=False,
    tie_word_embeddings=False, num_experts=2, num_experts_per_tok=1,
    moe_intermediate_size=16, norm_topk_prob=True, num_shared_experts=1,
    layer_group_size=2, first_k_dense_replace=0, group_norm_size=1, state_size=32,
    time_step_rank=4, conv_kernel=4, use_bias=False, use_conv_bias=True,
    attn_layer_offset=1, attn_layer_period=2, expert_layer_offset=1,
    expert_layer_period=2, mamba_d_conv=4, mamba_d_state=8, mamba_expand=2,
    a_low_rank_dim=8, v_low_rank_dim=8, gate_low_rank_dim=8, decay_low_rank_dim=8,
    conv1d_width=4, logits_soft_cap=30.0, attention_window_size=64, conv_window=2,
    block_types=["recurrent", "attention"], sliding_window=64,
    sliding_window_layers=[], mamba_num_heads=2, hybrid_override_pattern=["M", "*"],
    mamba_head_dim=16, ssm_state_size=32, n_groups=1, layer_norm_epsilon=1e-5,
    mamba_proj_bias=False, time_step_limit=(0.0, 100.0),
    linear_allow_neg_eigval=True, linear_num_value_heads=1,
    layer_types=["linear_attention", "full_attention"], linear_num_key_heads=1,
    linear_key_head_dim=32, linear_value_head_dim=32, linear_conv_kernel_dim=4,
    ffn_hidden_size=32, moe_topk=1, expert_ffn_hidden_size=16, n_routed_experts=2,
    zero_expert_num=1, zero_expert_type="identity", kv_lora_rank=16, q_lora_rank=16,
    qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, routed_scaling_factor=1.0,
    attention_method="MLA", mla_scale_q_lora=True, mla_scale_kv_lora=True,
    hidden_dim=32, num_kv_reuse_layers=1, num_kv_heads=1,
    hidden_dim_scale_factor=1.0, mamba_d_ssm=32, mamba_n_heads=2, mamba_d_head=16,
    mamba_n_groups=1, lm_head_multiplier=1.0, conv_bias=False, conv_L_cache=3,
    block_dim=32, block_ff_dim=32, block_multiple_of=8,
    block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=False,
    full_attn_idxs=[1], full_attention_interval=2, decoder_sparse_step=1,
    shared_expert_intermediate_size=16, mlp_only_layers=[],
    partial_rotary_factor=0.5)


def model_of(numbers):
    """A small model of random weights."""
    model_class, arguments = _get_classes(numbers)
    model = model_class(arguments.from_dict(numbers))
    mx.random.seed(0)
    model.update(tree_map(
        lambda x: mx.random.normal(x.shape) * (0.3 if x.ndim > 1 else 1),
        model.parameters()))
    return model.eval()


class Model(Batch):
    """The model does not show what a token sees, so the logits of each sequence are
    computed again without the other sequences, and must be the same."""
    histories = 10
    made, known = {}, {}  # The models, and the logits of their sequences.

    def __init__(self, setup):
        super().__init__(setup)
        if type(self) not in Model.made:
            Model.made[type(self)] = model_of(self.numbers)
        self.model = Model.made[type(self)]
        self.held = {}  # The number of tokens of each sequence.
        self.stored = {}  # The rows, by layer, sequence and position.

    def single(self):
        return self.model.make_cache()

    def length(self, sequence):
        return self.held.get(sequence, 0)

    def starts(self):
        return [self.length(sequence) for sequence in self.order]

    def before_mask(self):
        """Runs the model, and compares its logits."""
        tokens = numpy.zeros((len(self.order), self.queries), int)
        for row, i in self.where:
            tokens[row, i] = self.token(self.order[row], self.starts()[row] + i)
        self.fresh = [(self.order[row], self.starts()[row] + i) for row, i in self.where]
        logits = numpy.array(self.model(mx.array(tokens), cache=self.passing))
        counts = [sum(r == row for r, _ in self.where) for row in range(len(tokens))]
        for row, (sequence, count) in enumerate(zip(self.order, counts)):
            past = self.length(sequence)
            self.held[sequence] = past + count
            alone = self.alone(sequence, past + count)[past:]
            if not numpy.allclose(logits[row, :count], alone, rtol=1e-3, atol=1e-3):
                raise ValueError(f"{count} tokens of sequence {sequence}, after {past},"
                                 " have other logits than without the other sequences")

    def alone(self, sequence, length):
        """The logits of a sequence without the others."""
        known = Model.known.get((type(self), sequence), ())
        if len(known) < length:
            tokens = [self.token(sequence, i) for i in range(max(length, 12))]
            known = numpy.array(self.model(mx.array([tokens]), cache=self.single()))[0]
            Model.known[type(self), sequence] = known
        return known[:length]

    def token(self, sequence, position):
        return 3 + (7 * position * position + 5 * position + 11 * sequence) % 61

    def mask_of_pass(self):
        pass

    def put(self, layer, key, value):
        for place, *rows in zip(self.fresh, key, value):
            self.stored[layer, *place] = rows

    def get(self, layer):
        columns = [(sequence, position) for sequence in self.order
                   for position in range(self.length(sequence))]
        key, value = zip(*(self.stored[layer, *place] for place in columns))
        mask = numpy.array([[s == sequence and p <= position for s, p in columns]
                            for sequence, position in self.fresh])
        return numpy.array(key), numpy.array(value), mask

    def remove(self, sequence, begin, end):
        if begin:
            raise kvtwin.NotSupported
        self.finish()
        self.leave({sequence})
        self.held.pop(sequence, None)

    def can_resume(self, sequence, position):
        return position in (0, self.length(sequence))


def models_of(model_type, together=False, **more):
    """Makes a class for a type of model. Sequences come and continue at any time, or all
    together, after prompts of different lengths."""
    return type(model_type + "_together" * together, (Model,), {
        "kvtwin": kvtwin.Description(
            name=f"{model_type} in batches" + ", all together" * together,
            kinds={"causal"}, can=set() if together else {"mix"}, max_sequences=2),
        "numbers": {"model_type": model_type, **NUMBERS, **more},
        **({"lockstep": True, "histories": 20} if together else {})})


CLASSES = [
    models_of("mamba"), models_of("jamba"), models_of("rwkv7"),
    models_of("recurrent_gemma"), models_of("recurrent_gemma", together=True),
    models_of("baichuan_m1"), models_of("bailing_moe_linear"), models_of("nemotron_h"),
    models_of("olmo_hybrid"), models_of("longcat_flash_ngram"),
    models_of("longcat_flash_ngram", together=True),
    models_of("afm7", num_layers=2), models_of("mamba2"), models_of("falcon_h1"),
    models_of("lfm2"), models_of("qwen3_next"),
]
