"""Numbers and weights for small models of mlx-lm and mlx-vlm."""

import mlx.core as mx
from mlx.utils import tree_map

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


def randomize(model):
    """Gives a model random weights, the same each time."""
    mx.random.seed(0)
    model.update(tree_map(
        lambda x: mx.random.normal(x.shape) * (0.3 if x.ndim > 1 else 1),
        model.parameters()))
