"""What klein's tensors are called in the released folders: data for chapter 8's `rename`. A sister's are in her family.

A rule with three targets says that our tensor is three of theirs, stacked. Our own names are those of the authors'
single files.
"""

from ..checkpoints import Rule, swap_halves

TRANSFORMER_NAMES: list[Rule] = [
    Rule(r"^img_in", ["x_embedder"]),
    Rule(r"^txt_in", ["context_embedder"]),
    Rule(r"^time_in.in_layer", ["time_guidance_embed.timestep_embedder.linear_1"]),
    Rule(r"^time_in.out_layer", ["time_guidance_embed.timestep_embedder.linear_2"]),
    Rule(r"(_modulation.*)\.lin\.", [r"\1.linear."]),
    Rule(r"^final_layer.adaLN_modulation.1", ["norm_out.linear"], swap_halves),  # it is its own way back
    Rule(r"^final_layer.linear", ["proj_out"]),
    Rule(r"^single_blocks", ["single_transformer_blocks"]),
    Rule(r"linear1", ["attn.to_qkv_mlp_proj"]),
    Rule(r"linear2", ["attn.to_out"]),
    Rule(r"(single.*)\.norm\.query_norm\.scale", [r"\1.attn.norm_q.weight"]),
    Rule(r"(single.*)\.norm\.key_norm\.scale", [r"\1.attn.norm_k.weight"]),
    Rule(r"^double_blocks", ["transformer_blocks"]),
    Rule(r"img_attn.qkv", ["attn.to_q", "attn.to_k", "attn.to_v"]),
    Rule(r"txt_attn.qkv", ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"]),
    Rule(r"img_attn.norm.query_norm.scale", ["attn.norm_q.weight"]),
    Rule(r"img_attn.norm.key_norm.scale", ["attn.norm_k.weight"]),
    Rule(r"txt_attn.norm.query_norm.scale", ["attn.norm_added_q.weight"]),
    Rule(r"txt_attn.norm.key_norm.scale", ["attn.norm_added_k.weight"]),
    Rule(r"img_attn.proj", ["attn.to_out.0"]),
    Rule(r"txt_attn.proj", ["attn.to_add_out"]),
    Rule(r"img_mlp.0", ["ff.linear_in"]),
    Rule(r"img_mlp.2", ["ff.linear_out"]),
    Rule(r"txt_mlp.0", ["ff_context.linear_in"]),
    Rule(r"txt_mlp.2", ["ff_context.linear_out"]),
]

AUTOENCODER_NAMES: list[Rule] = [
    Rule(r"^encoder.quant_conv", ["quant_conv"]),
    Rule(r"^decoder.post_quant_conv", ["post_quant_conv"]),
    Rule(r"\.down\.(\d)", [r".down_blocks.\1"]),
    Rule(r"\.up\.0", [".up_blocks.3"]),  # the folders count the decoder's levels from the coarse end,
    Rule(r"\.up\.1", [".up_blocks.2"]),  # the single file from the fine end
    Rule(r"\.up\.2", [".up_blocks.1"]),
    Rule(r"\.up\.3", [".up_blocks.0"]),
    Rule(r"\.block\.(\d)", [r".resnets.\1"]),
    Rule(r"\.downsample\.", [".downsamplers.0."]),
    Rule(r"\.upsample\.", [".upsamplers.0."]),
    Rule(r"mid\.block_1", ["mid_block.resnets.0"]),
    Rule(r"mid\.block_2", ["mid_block.resnets.1"]),
    Rule(r"mid\.attn_1\.norm", ["mid_block.attentions.0.group_norm"]),
    Rule(r"mid\.attn_1\.proj_out", ["mid_block.attentions.0.to_out.0"]),
    Rule(r"mid\.attn_1\.(q|k|v)\.", [r"mid_block.attentions.0.to_\1."]),
    Rule(r"nin_shortcut", ["conv_shortcut"]),
    Rule(r"norm_out", ["conv_norm_out"]),
]

TEXT_ENCODER_NAMES: list[Rule] = [Rule(r"^(?!lm_head)", ["model."])]
