"""The layers of Hugging Face's families whose residual sums, norms and dropouts are fused.

Norms, feed-forward layers, attention and experts are known by their code or by transformers'
registries (``tables.py``). A file here has ``RULES``: class whose code is listed in
``known_code.toml`` -> a function that makes the rule of a class with that code, from the class and
the name of the module for the patched one. No file imports a model's.
"""
