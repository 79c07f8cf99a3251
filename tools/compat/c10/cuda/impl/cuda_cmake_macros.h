// Empty on purpose. A CPU-only torch does not ship this generated header, which c10/cuda/*.h
// includes; with it, the CUDA bindings can be compile-checked on a machine without CUDA torch.
#pragma once
