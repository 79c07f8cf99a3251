"""Pretrain a small model on your own text and generate with it; docs/tutorials/pretrain.md."""

# %%
import pkgutil
from pathlib import Path

import fusedops
from fusedops.models import load_huggingface
from fusedops.train import train

# Any folder with UTF-8 text will do. Here it is source code of Python's own library.
corpus = Path("corpus")
corpus.mkdir(exist_ok=True)
for name in ("argparse", "ast", "dataclasses", "inspect", "pathlib", "shutil", "tarfile", "typing"):
    source = Path(pkgutil.resolve_name(name).__file__)
    (corpus / f"{name}.py").write_text(source.read_text())
print(sum(file.stat().st_size for file in corpus.iterdir()), "bytes of text")

# %%
config = {
    "out": "runs/pretrain",  # checkpoints, metrics and the tokens
    "steps": 300,
    "batch": 8,  # sequences of a step
    "model": {
        "preset": "tiny-llama",  # its architecture, with other sizes
        "hidden_size": 128,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "intermediate_size": 352,
    },
    "data": {"train": ["corpus/*.py"], "seq_len": 128},
    "optimizer": {"lr": 3e-3},
    "schedule": {"kind": "cosine", "warmup": 20},
    "validation": {"every": 100},
    "export": "model",  # the trained weights in the format of transformers
}


class Progress:
    """What to do while a run trains."""

    def begin(self, run):
        print(f"begins after step {run.step}")

    def show(self, record):
        if record["step"] % 50 == 0:
            print(f"step {record['step']}  loss {record['loss']:.3f}")


result = train(config, callback=Progress())
if result.validation_loss is not None:  # all steps were done by an earlier call otherwise
    print(f"validation loss {result.validation_loss:.3f}")

# %%
result = train(config, ["steps=400"], callback=Progress())

# %%
model = load_huggingface("model")  # the folder of "export"
prompt = "    def __init__(self"
# The tokenizer "bytes" has a token for each byte, and 256 for the end of a file.
output = fusedops.generate(model, [list(prompt.encode())], tokens=100, temperature=0.7, seed=1)
print(prompt + bytes(token for token in output[0].tokens if token < 256).decode(errors="replace"))
