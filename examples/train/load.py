"""Expert load of a routing: how uneven the experts' shares of the routes are."""

import numpy as np


def load_facts(ids, experts):
    """ids [tokens, k] -> shares of all experts and the numbers that sum them up; an even load has max/mean 1."""
    share = np.bincount(ids.reshape(-1), minlength=experts) / ids.size
    used = share[share > 0]
    return {
        "max_over_mean": float(share.max() * experts),
        "min_over_mean": float(share.min() * experts),
        "busiest_quarter_share": float(np.sort(share)[::-1][: experts // 4].sum()),
        "entropy_over_uniform": float(-(used * np.log(used)).sum() / np.log(experts)),
        "share": [round(float(s), 5) for s in share],
    }


def routing_facts(ids, window_source, sources, experts):
    """ids [layers, tokens, k] -> for each layer the load over all text and over each source alone."""
    ids = np.asarray(ids)
    token_source = np.repeat(np.asarray(window_source), ids.shape[1] // len(window_source))
    return [
        {
            "layer": layer,
            "all": load_facts(ids[layer], experts),
            **{source: load_facts(ids[layer][token_source == i], experts) for i, source in enumerate(sources)},
        }
        for layer in range(len(ids))
    ]
