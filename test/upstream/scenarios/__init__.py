"""Scenarios over upstream's test fixtures, run in a child process against one SGLang tree.

``sglang/test/kits/unified_radix_cache`` in the wheel holds fixtures, not tests: the tests that use
them are not released. The scenarios here put the fixtures to work. What they assert holds on stock;
what they record is compared between the trees.
"""
