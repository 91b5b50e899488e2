"""A stock room that hears of orders and reserves what was ordered: each order once, however often it comes.

Needs nothing but postroom: ``python -m examples.stock``
"""
