"""The configuration that ``fusedops train --example`` writes: every key, with what it means.

It runs on the corpus of the demo, the source of the installed sympy package, which torch brings.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fusedops.launch.config_table import InputError

_TEXT = """\
# fusedops train NAME                   one process
# fusedops train NAME --processes 2     two, sharing each step (see [parallel])
# fusedops train NAME --set steps=400 --set optimizer.lr=3e-4
#
# Started again, a run resumes from its last checkpoint: with the same bits, also after a kill -9.
# Keys that are left out have the values that stand here, or those that the comments call default.
# out, steps, batch and data.train have none.

out = "runs/example"          # checkpoints, metrics.jsonl, cache of tokens
steps = 200
batch = 8                     # sequences of a step, on all processes together
seed = 0                      # of weights, order of the data, dropout
device = "auto"               # cpu, cuda; auto: a GPU where there is one
export = ""                   # folder for the trained weights as a Hugging Face checkpoint
tune_host = true              # processes keep memory that they have touched: faster on the CPU
arena = false                 # true: a step's buffers lie at planned addresses in one block

[model]                       # a preset, and sizes that differ from it; or all sizes; or
                              # load = "folder": a Hugging Face checkpoint to go on from
preset = "tiny-llama"         # docs/training.md lists them
hidden_size = 256
num_layers = 4
num_heads = 8
num_kv_heads = 4
intermediate_size = 704
# seq_len                     by default data.seq_len
# vocab_size                  by default the tokenizer's, rounded up to a multiple of 64

[data]
train = ["CORPUS"]
validation = []               # the same; none: the last validation_share of the tokens above
validation_share = 0.05
seq_len = 128                 # default: 256
tokenizer = "bytes"           # or a tokenizer.json; files of tokens (.bin) need none
end_of_text = "<|endoftext|>" # of a tokenizer.json: stands between two files
token_dtype = "uint16"        # of files of tokens: uint16, int32, int64
cache = ""                    # by default out/cache
shuffle = true
errors = "strict"             # text that is not UTF-8: strict, skip (the file), replace (the bytes)
documents = false             # true: tokens attend only those of their own file
domains = false               # true: each entry of train is a domain (model.domain_experts)

[optimizer]                   # fusedops.optim.AdamW
lr = 3e-3                     # default: 0.0003
betas = [0.9, 0.95]
eps = 1e-8
weight_decay = 0.1
no_decay = "vectors"          # biases and norms; or a list of name patterns, ["*norm*"]
clip = 1.0                    # largest norm of all gradients; 0: any
state_dtype = "float32"       # bfloat16 halves the moments, rounded at random

[schedule]
kind = "cosine"               # constant, linear, cosine, stable-decay
warmup = 20                   # steps; default: 0
final = 0.1                   # last learning rate, as a share of the largest
decay = 0                     # stable-decay: steps of the decay; 0: a tenth of all

[precision]
param = "auto"                # weights in forward and backward, with float32 masters: float32,
                              # bfloat16, float16; auto: bfloat16 on a GPU, else float32
reduce = "float32"            # gradients are accumulated and summed over ranks in it
compute = "auto"              # bfloat16, float16: autocast of float32 weights instead of param
loss_scale = 65536.0          # first one, of float16
growth = 2000                 # good steps until it doubles

[parallel]                    # dp x tp x cp is the number of processes
# dp = 1                      # data parallel; by default what the processes leave for it
tp = 1                        # tensor parallel: heads, features and words are divided
sp = false                    # sequence parallel: norms, too, on 1 / tp of the tokens
cp = 1                        # context parallel: sequences are divided
ep = 1                        # expert parallel, inside of dp x cp
ep_chunks = 1                 # parts of the tokens: one travels while experts compute another
ep_nodes = 1                  # nodes that the ranks of ep lie on: a token goes to each once
zero = 0                      # 1, 2, 3: states, gradients, weights are divided over dp x cp
microbatches = 1              # parts of a step, one after another
recompute = "none"            # norm, activation, selective, full: what the backward makes again
offload = []                  # "optimizer", "activations", "experts": to the host's memory

[checkpoint]
every = 50                    # steps; 0: at the end only; default: 500
keep = 3

[validation]
every = 50                    # default: 250
sequences = 32                # 0: none; default: 64

[guard]                       # docs/checkpoint.md
on_nonfinite = "skip"         # skip, rollback, stop
on_spike = "go"               # skip, rollback, stop, go
spike = 8.0
window = 64
patience = 8
max_rollbacks = 2

[log]
every = 10                    # steps between lines; metrics.jsonl has all
tensorboard = false
wandb = ""                    # a project of Weights & Biases; "": none
mlflow = ""                   # an experiment of MLflow; "": none
peak_tflops = 0.0             # of a device, for the MFU; 0: measured at the start
timings = 5                   # steps between gatherings of all ranks' times; 0: none
memory_step = 0               # a step of which memory is recorded by layer and kind; 0: none
memory_snapshot = false       # CUDA's memory snapshot when memory is exhausted

[faults]                      # docs/faults.md
timeout = 600.0               # seconds without progress until a process is said to hang; 0: never
"""


def example(name: str) -> str:
    """Return a commented configuration, to be written to a file of this name."""
    spec = importlib.util.find_spec("sympy")
    if spec is None or not spec.submodule_search_locations:
        raise InputError("the example's corpus is the source of sympy: pip install sympy")
    folder = Path(next(iter(spec.submodule_search_locations)))
    return _TEXT.replace("NAME", name).replace("CORPUS", str(folder / "**" / "*.py"))
