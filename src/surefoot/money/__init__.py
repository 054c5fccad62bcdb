"""Money: what a run will cost (the planner) and, from its events, what it did cost.

Nothing outside ``surefoot.cli`` imports this package. The engines need only the standard library and numpy; the mix of
capacity kinds needs scipy (``pip install 'surefoot[plan]'``).

    units        quantities with their dimension, read from text such as "840 GB", "3.1 GB/s", "5 min"
    phases       exactly one phase for each billed GPU-second
    job          the work to do, and the timing of one checkpoint scheme on it
    survival     which losses a replica scheme outlives
    hazards      interruption models: exponential, Weibull, heavy-tailed, traces, advisor buckets, event logs
    traces       readers of trace files
    closed_form  exact expectations
    simulate     thousands of seeded runs at once
    schemes      checkpoint schemes as data
    catalogue    dated prices; checks, overrides, updates
    transfer     storage, requests and the three transfer traps
    money        dollars from phases; what the price saves and what the scheme saves
    deadlines    spot, on-demand and waiting under a deadline: four policies on availability traces
    mix          integer nodes of each kind over periods
    ownership    months of owning, reserving and renting; payback
    planner      all of it, for one request
"""
