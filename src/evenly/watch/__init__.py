"""A run while it trains: a page on this machine, kept up to date by the server. No torch here.

::

    thinning  fewer points of a growing series; no point is looked at twice
    follow    the growing record, read once, from where the last look ended
    ranks     how each rank is: what the watchdog says, what the kernel says, and how old it is
    frames    what the page shows at one moment, and what changed since the last
    hub       one reader for any number of viewers
    server    the page and its events over HTTP (with page.html, page.css and page.js)

`server` is the only module that uses starlette and uvicorn.
"""
