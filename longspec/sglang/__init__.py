"""GLIDE drafts on SGLang: a plugin that adds the speculative algorithm GLIDE to an unmodified SGLang.

SGLang finds `register` by the entry point group `sglang.srt.plugins`. The other modules import SGLang, or are imported
by those that do; `longspec` itself never imports it. A round is in `worker`; a greedy one is a graph of `greedy_round`.
"""


def register() -> None:
    """Entry point: register GLIDE with SGLang. Runs in each of its processes."""
    from longspec.sglang.algorithm import register_glide

    register_glide()
