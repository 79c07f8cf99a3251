"""C++ programs under the compiler's sanitizers: ``make test-sanitizers``."""
