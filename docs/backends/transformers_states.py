"""Models of transformers whose layers fold their tokens into a state, under kvtwin's
oracle: docs/backends/transformers.md and, for older versions, pinned.py."""

import inspect

import pipe as kvtwin
import torch
import transformers

SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    initializer_range=0.3, max_position_embeddings=64, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)
DELTA = dict(
    linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8,
    linear_value_head_dim=8, linear_conv_kernel_dim=4)
EXPERTS = dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
               shared_expert_intermediate_size=16)


class States:
    """One sequence. The model does not show its states, so each batch is computed again
    without a cache, after each earlier state: the batch read the state that gives the
    same outputs."""
    placed = True  # The model is told the positions of its tokens.

    def __init__(self, setup):
        self.setup = setup
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**{**SMALL, **self.options})
        self.model = getattr(transformers, self.model_class)(config).eval()
        for weight in self.model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.3)
        self.takes = inspect.signature(self.model.forward).parameters
        self.clear()

    def clear(self):
        self.cache = transformers.DynamicCache(config=self.model.config)
        self.tokens = []  # The tokens of the sequence.
        self.rows = {}  # The rows, by length and layer.

    def start_forward(self, positions, sequences):
        if positions[-1] >= self.setup.capacity:
            raise kvtwin.CacheFull
        self.past = len(self.tokens)
        self.tokens += [3 + (7 * p * p + 5 * p) % 61 for p in positions]
        options = {"cache" if "cache" in self.takes else "past_key_values":
                   self.cache}
        if self.placed and "position_ids" in self.takes:
            options["position_ids"] = torch.tensor([positions])
        self.outputs = self.run(self.tokens[self.past:], use_cache=True, **options)
        self.read = self.state_read()

    def run(self, tokens, **options):
        with torch.no_grad():
            return self.model(torch.tensor([tokens]), **options).logits[0]

    def state_read(self):
        batch = self.tokens[self.past:]
        for length in range(self.past, -1, -1):
            expected = self.run(self.tokens[:length] + batch,
                                use_cache=False)[length:]
            if torch.allclose(self.outputs, expected, rtol=1e-3, atol=1e-3):
                return length
        raise ValueError(f"the outputs of {len(batch)} tokens after {self.past} "
                         "follow from no state")

    def put(self, layer, key, value):
        for i, rows in enumerate(zip(key, value)):
            self.rows[self.past + i + 1, layer] = rows

    def get(self, layer):
        key, value = self.rows[self.read or len(self.tokens), layer]
        mask = torch.full((len(self.outputs), 1), self.read > 0)
        return key[None], value[None], mask.numpy()

    def remove(self, sequence, begin, end):
        self.clear()  # States cannot be rolled back.

    def can_resume(self, sequence, position):
        return position in (0, len(self.tokens))


def states_of(model, config=None, placed=True, **options):
    """Makes a class for a model, with the name of the model."""
    name = model + "Unplaced" * (not placed)
    return type(name, (States,), {
        "kvtwin": kvtwin.Description(
            name=f"{model}ForCausalLM" + (
                "" if placed else ", positions left out"), kinds={"recurrent"}),
        "model_class": f"{model}ForCausalLM", "placed": placed,
        "config": config or f"{model}Config", "options": options})


def mamba_of(model, **options):
    """The second version of Mamba, as several models have it."""
    return states_of(model, mamba_d_state=8, mamba_n_heads=4, mamba_d_head=16,
                     mamba_n_groups=1, mamba_chunk_size=4, **options)


TYPES = ["linear_attention", "full_attention"]
Qwen3_5 = states_of("Qwen3_5", "Qwen3_5TextConfig", layer_types=TYPES, **DELTA)
CLASSES = [] if not hasattr(transformers, "Zamba2Config") else [
    Qwen3_5,
    states_of("Qwen3Next", layer_types=TYPES, **DELTA, **EXPERTS),
    states_of("OlmoHybrid", layer_types=TYPES, **DELTA),
    states_of("Lfm2", layer_types=["conv", "full_attention"],
              block_multiple_of=8),
    states_of("Mamba2", state_size=8, num_heads=4, head_dim=16, n_groups=1,
              chunk_size=4),
    mamba_of("FalconH1", mamba_d_ssm=64),
    mamba_of("GraniteMoeHybrid", layer_types=["mamba", "attention"],
             num_local_experts=2, num_experts_per_tok=1),
    *(mamba_of("Bamba", attn_layer_indices=[1], **more)
      for more in ({}, {"placed": False})),
    states_of("NemotronH", ssm_state_size=8, mamba_num_heads=4, mamba_head_dim=16,
              n_groups=1, chunk_size=4, layers_block_type=["mamba", "attention"]),
    states_of("Zamba2", mamba_d_state=8, n_mamba_heads=4, mamba_headdim=16,
              mamba_ngroups=1, num_hidden_layers=3, attention_head_dim=32,
              layers_block_type=["mamba", "mamba", "hybrid"], chunk_size=4,
              num_mem_blocks=1),
    states_of("Mamba", state_size=8),
    states_of("FalconMamba", state_size=8),
    states_of("Jamba", mamba_d_state=8, attn_layer_period=2, attn_layer_offset=1,
              num_experts=2, use_mamba_kernels=False),
]
