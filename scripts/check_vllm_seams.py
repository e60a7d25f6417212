"""Check that sources of vLLM have everything of vLLM that the plugin uses, without importing or running any of it.

    python scripts/check_vllm_seams.py FOLDER...

Each folder holds an unpacked wheel (`vllm/__init__.py` lies in it). Exits with 1 if something is missing.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

_MOE = "vllm/model_executor/layers/fused_moe"
# File: names that it must have. `Class.name` is a method, property or field; `function(a, b)` has arguments of these names;
# `self.name` is assigned somewhere in the class before it.
SEAMS: dict[str, tuple[str, ...]] = {
    "vllm/model_executor/custom_op.py": ("op_registry_oot", "PluggableLayer", "PluggableLayer.register_oot"),
    f"{_MOE}/routed_experts.py": (
        "RoutedExperts.forward_modular(x, topk_weights, topk_ids, shared_experts, shared_experts_input)",
        "RoutedExperts.forward_monolithic",
        "RoutedExperts.expert_map",
        "RoutedExperts.self.layer_name",
        "RoutedExperts.self.moe_config",
        "RoutedExperts.self.quant_method",
        "RoutedExperts.self.local_num_experts",
        "RoutedExperts.self.global_num_experts",
        "RoutedExperts.self.lora_base_layer_prefix",
    ),
    f"{_MOE}/runner/moe_runner.py": ("MoERunner.self.routed_experts", "MoERunner.self.router", "MoERunner.self.layer_name"),
    f"{_MOE}/runner/moe_runner_interface.py": ("MoERunnerInterface",),
    f"{_MOE}/fused_moe_method_base.py": (
        "FusedMoEMethodBase.is_monolithic",
        "FusedMoEMethodBase.self.moe_kernel",
        "FusedMoEMethodBase.self.moe_quant_config",
    ),
    f"{_MOE}/modular_kernel.py": ("FusedMoEKernel.fused_experts", "FusedMoEExperts.block_shape"),
    f"{_MOE}/config.py": (
        "FusedMoEQuantConfig._w1",
        "FusedMoEQuantConfig._w2",
        "FusedMoEQuantConfig.config_name(dtype)",
        "FusedMoEQuantDesc.scale",
        "FusedMoEQuantDesc.alpha_or_gscale",
        "FusedMoEQuantDesc.zp",
        "FusedMoEQuantDesc.bias",
        "FusedMoEParallelConfig.use_all2all_kernels",
    ),
    f"{_MOE}/__init__.py": ("get_config()", "override_config(config)"),
    f"{_MOE}/fused_moe.py": ("try_get_optimal_moe_config(w1_shape, w2_shape, top_k, dtype, M, block_shape)",),
    f"{_MOE}/experts/triton_moe.py": ("TritonExperts",),
    "vllm/model_executor/layers/quantization/base_config.py": ("QuantizeMethodBase.process_weights_after_loading",),
    "vllm/model_executor/layers/logits_processor.py": ("LogitsProcessor", "LogitsProcessor.forward"),
    "vllm/model_executor/models/transformers/moe.py": ("TransformersMoERunner",),
    "vllm/forward_context.py": ("ForwardContext.attn_metadata", "get_forward_context()", "is_forward_context_available()"),
    "vllm/config/parallel.py": (
        "ParallelConfig.enable_eplb",
        "ParallelConfig.enable_elastic_ep",
        "ParallelConfig.use_ubatching",
        "ParallelConfig.pipeline_parallel_size",
        "ParallelConfig.data_parallel_size",
        "ParallelConfig.enable_expert_parallel",
    ),
    "vllm/config/model.py": (
        "ModelConfig.enable_sleep_mode",
        "ModelConfig.enforce_eager",
        "ModelConfig.quantization",
        "ModelConfig.is_moe",
        "ModelConfig.model",
    ),
    "vllm/config/offload.py": (
        "OffloadConfig.offload_backend",
        "OffloadConfig.uva",
        "OffloadConfig.prefetch",
        "UVAOffloadConfig.cpu_offload_gb",
        "PrefetchOffloadConfig.offload_group_size",
    ),
    "vllm/config/compilation.py": (
        "CompilationConfig.cudagraph_mode",
        "CompilationConfig.static_forward_context",
        "CompilationConfig.static_all_moe_layers",
    ),
    "vllm/config/vllm.py": (
        "VllmConfig.additional_config",
        "VllmConfig.offload_config",
        "VllmConfig.speculative_config",
        "VllmConfig.device_config",
        "get_current_vllm_config()",
    ),
    "vllm/config/speculative.py": ("SpeculativeConfig.method",),
}


def main(folders: list[str]) -> int:
    """Check each folder and print what is missing in it."""
    missing = 0
    for folder in folders:
        absent = [f"{file}: {name}" for file, names in SEAMS.items() for name in _absent(Path(folder) / file, names)]
        print(f"{folder}: {'complete' if not absent else f'{len(absent)} missing'}")
        print("".join(f"  {one}\n" for one in absent), end="")
        missing += len(absent)
    return int(missing > 0)


def _absent(file: Path, names: tuple[str, ...]) -> list[str]:
    if not file.is_file():
        return list(names)
    known = _known(ast.parse(file.read_text(encoding="utf-8")))
    return [name for name in names if not _is_there(name, known)]


def _is_there(name: str, known: dict[str, list[list[str]]]) -> bool:
    name, _, arguments = name.partition("(")
    wanted = [argument.strip() for argument in arguments.rstrip(")").split(",") if argument.strip()]
    return any(set(wanted) <= set(found) for found in known.get(name, []))


def _known(tree: ast.Module) -> dict[str, list[list[str]]]:
    """Every name of a file, as it is written in `SEAMS`, with the arguments of each of its definitions."""
    known: dict[str, list[list[str]]] = {}
    classes = [part for part in tree.body if isinstance(part, ast.ClassDef)]
    inside = [(part, f"{owner.name}.") for owner in classes for part in owner.body]
    for node, prefix in [*((part, "") for part in tree.body), *inside]:
        if isinstance(node, ast.FunctionDef):
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            known.setdefault(prefix + node.name, []).append([argument.arg for argument in arguments])
        elif isinstance(node, ast.ClassDef):
            known.setdefault(prefix + node.name, []).append([])
        for target in (
            [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
        ):
            if isinstance(target, ast.Name):
                known.setdefault(prefix + target.id, []).append([])
        if prefix:
            for inner in ast.walk(node):
                targets = inner.targets if isinstance(inner, ast.Assign) else [getattr(inner, "target", None)]
                for target in (part for one in targets for part in getattr(one, "elts", [one])):
                    if isinstance(target, ast.Attribute) and getattr(target.value, "id", None) == "self":
                        known.setdefault(f"{prefix}self.{target.attr}", []).append([])
    return known


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
