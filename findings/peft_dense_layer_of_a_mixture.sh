#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.23.0: LoRA on the dense MLP of a mixture of experts, named by its
# full path, adapts all experts of the other layers instead, and not the layer that was named.
#
# Expected: target_modules=["model.layers.0.mlp.gate_proj", ...up_proj, ...down_proj] of a Qwen3-MoE
#   whose layer 0 is dense (mlp_only_layers=[0]) puts adapters on these three nn.Linear.
# Seen: no module is adapted; model.layers.1.mlp.experts.gate_up_proj and .down_proj are, which no
#   target names. The only sign is a warning about rank_pattern keys. An adapter that was trained on the dense layer (the same names
#   in its adapter_config.json) is loaded onto the experts: its weights are dropped.
#   The conversion of target names of transformers 4 (gate_proj, up_proj, down_proj, also behind a
#   dot) looks at the last part of a name alone. DeepSeek-V3, GLM-4-MoE, ERNIE 4.5 MoE and Qwen3-Next
#   go the same way with their dense layers and shared experts.
# Exits with 1 if peft behaves otherwise.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 peft==0.21.2 2>/dev/null
HF_HUB_OFFLINE=1 "$work/venv/bin/python" - "$work" <<'PYTHON'
import sys, warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

warnings.simplefilter("ignore")
folder = sys.argv[1] + "/adapter"


def model():
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=48, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
        mlp_only_layers=[0], max_position_embeddings=64,
    )).eval()


names = [f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")]
assert all(isinstance(model().get_submodule(name), torch.nn.Linear) for name in names)
config = LoraConfig(r=4, lora_alpha=8, target_modules=names, task_type="CAUSAL_LM")
made = get_peft_model(model(), config)
modules, parameters = made.targeted_module_names, made.targeted_parameter_names
print("named:   ", names)
print("adapted: ", modules, parameters)

# The adapter that the names ask for, in PEFT's own format: every weight far from 0.
base = model()
LoraConfig(r=4, lora_alpha=8, target_modules=names, task_type="CAUSAL_LM").save_pretrained(folder)
tensors = {}
for name in names:
    out_features, in_features = base.get_submodule(name).weight.shape
    tensors[f"base_model.model.{name}.lora_A.weight"] = torch.ones(4, in_features)
    tensors[f"base_model.model.{name}.lora_B.weight"] = torch.ones(out_features, 4)
save_file(tensors, folder + "/adapter_model.safetensors", metadata={"format": "pt"})
ids = torch.arange(2, 34).reshape(2, 16)
with torch.no_grad():
    moved = (PeftModel.from_pretrained(model(), folder)(input_ids=ids).logits - base(input_ids=ids).logits).abs().max()
print("logits moved by the loaded adapter:", float(moved))
experts = ["model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"]
sys.exit(0 if not modules and parameters == experts and moved == 0 else 1)
PYTHON
echo "as described"
