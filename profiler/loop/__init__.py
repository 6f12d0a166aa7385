"""The training loop, as everything else sees it: its events, its steps, its clock, and the patches of torch for it.

    a batch is asked for ── delivered ──▶ the model is called ──▶ backward ──▶ the optimizer steps ──▶ the next request
                                                                                      └── or, where no loader feeds
                                                                                          the loop, the next call

**The rule for a step.** A step has ended once an optimizer of the model has stepped: at the next request for a batch,
or where the loop asks for none, at the model's next call (`steps`). A batch counts when its backward pass has run; a
pass over a loader that trains nothing counts nothing (`batches`).
"""
