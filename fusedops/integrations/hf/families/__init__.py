"""Hugging Face's families: rules for what only they have, and their fused classes.

Norms, feed-forward layers and experts are mostly known by their code or by transformers' registries
(``tables.py``); what is here are the layers around them, attention and routers. A file has
``RULES``; one for families that are one another under other names (``*_like.py``) has ``FAMILIES``
and ``rules(name)``. It is imported when the model at hand is of its family, never before.
"""

# Name of a family in transformers -> the file here. Of several originals with the same methods the
# first gives its name to the report.
FAMILIES = {
    "llama": "llama_like",
    "gemma": "llama_like",
    "bert": "bert_like",
    "gpt2": "gpt2",
    "vit": "vit",
    **dict.fromkeys(("camembert", "electra", "roberta", "xlm_roberta"), "bert_like"),
    **dict.fromkeys(("gemma2", "mistral", "phi3", "qwen2", "qwen3"), "llama_like"),
    **dict.fromkeys(("deepseek_v3", "gpt_oss", "mixtral", "olmoe"), "moe_like"),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), "moe_like"),
    **{name: name for name in ("clip", "distilbert", "gpt_neox", "opt", "phi", "t5", "whisper")},
}
