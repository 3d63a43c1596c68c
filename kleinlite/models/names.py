"""What klein's tensors are called in the released folders: data for chapter 8's `rename`. A sister's are in her family.

Each rule is a regular expression and what takes its place; a rule with three replacements says that our tensor is
three of theirs, stacked. Our own names are those of the authors' single files.
"""

from ..checkpoints import Rule, swap_halves

TRANSFORMER_NAMES: list[Rule] = [
    (r"^img_in", "x_embedder"),
    (r"^txt_in", "context_embedder"),
    (r"^time_in.in_layer", "time_guidance_embed.timestep_embedder.linear_1"),
    (r"^time_in.out_layer", "time_guidance_embed.timestep_embedder.linear_2"),
    (r"(_modulation.*)\.lin\.", r"\1.linear."),
    (r"^final_layer.adaLN_modulation.1", "norm_out.linear", swap_halves),  # it is its own way back
    (r"^final_layer.linear", "proj_out"),
    (r"^single_blocks", "single_transformer_blocks"),
    (r"linear1", "attn.to_qkv_mlp_proj"),
    (r"linear2", "attn.to_out"),
    (r"(single.*)\.norm\.query_norm\.scale", r"\1.attn.norm_q.weight"),
    (r"(single.*)\.norm\.key_norm\.scale", r"\1.attn.norm_k.weight"),
    (r"^double_blocks", "transformer_blocks"),
    (r"img_attn.qkv", "attn.to_q", "attn.to_k", "attn.to_v"),
    (r"txt_attn.qkv", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    (r"img_attn.norm.query_norm.scale", "attn.norm_q.weight"),
    (r"img_attn.norm.key_norm.scale", "attn.norm_k.weight"),
    (r"txt_attn.norm.query_norm.scale", "attn.norm_added_q.weight"),
    (r"txt_attn.norm.key_norm.scale", "attn.norm_added_k.weight"),
    (r"img_attn.proj", "attn.to_out.0"),
    (r"txt_attn.proj", "attn.to_add_out"),
    (r"img_mlp.0", "ff.linear_in"),
    (r"img_mlp.2", "ff.linear_out"),
    (r"txt_mlp.0", "ff_context.linear_in"),
    (r"txt_mlp.2", "ff_context.linear_out"),
]

AUTOENCODER_NAMES: list[Rule] = [
    (r"^encoder.quant_conv", "quant_conv"),
    (r"^decoder.post_quant_conv", "post_quant_conv"),
    (r"\.down\.(\d)", r".down_blocks.\1"),
    (r"\.up\.0", ".up_blocks.3"),  # the folders count the decoder's levels from the coarse end,
    (r"\.up\.1", ".up_blocks.2"),  # the single file from the fine end
    (r"\.up\.2", ".up_blocks.1"),
    (r"\.up\.3", ".up_blocks.0"),
    (r"\.block\.(\d)", r".resnets.\1"),
    (r"\.downsample\.", ".downsamplers.0."),
    (r"\.upsample\.", ".upsamplers.0."),
    (r"mid\.block_1", "mid_block.resnets.0"),
    (r"mid\.block_2", "mid_block.resnets.1"),
    (r"mid\.attn_1\.norm", "mid_block.attentions.0.group_norm"),
    (r"mid\.attn_1\.proj_out", "mid_block.attentions.0.to_out.0"),
    (r"mid\.attn_1\.(q|k|v)\.", r"mid_block.attentions.0.to_\1."),
    (r"nin_shortcut", "conv_shortcut"),
    (r"norm_out", "conv_norm_out"),
]

TEXT_ENCODER_NAMES: list[Rule] = [(r"^(?!lm_head)", "model.")]
