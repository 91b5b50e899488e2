"""A shop that takes orders and keeps them in Redis: each command once, however often it comes.

Needs a server and ``postroom[redis]``: ``python -m examples.orders redis://localhost:6379``

One that is not set up to keep what it is told is refused, with words on what to do about it; to see the example at work
all the same, say ``volatile`` after its address.
"""
