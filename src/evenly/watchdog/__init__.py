"""Who is stuck, where, and who is slow: each rank says what it does, and somebody looks.

::

    activity   what this process does now; the training thread only sets attributes
    limits     when a rank that does not move is reported, and when the run is ended
    beats      a thread of each rank publishes its activity in the store, about once a second
    judge      who is stuck and who waits for whom: arithmetic alone
    words      the words for it
    stacks     the Python stack of a process, also one that holds Python's lock
    blackbox   where a process is that cannot speak; files: where the launcher finds these two
    pace       which rank is slow, and whether by data or by computing
    table      all of it as JSON, for a page
    watcher    looks at the beats, reports, and says when to end the run
    peers      ranks that watch each other
    watching   whether and how this process is watched

The launcher watches where there is one; else a thread of the lowest rank that is not stuck itself.
"""
