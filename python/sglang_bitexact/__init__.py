"""The tool of the patch series: build, apply, check. See ``sglang-bitexact --help``."""

__version__ = "0.1.0"
