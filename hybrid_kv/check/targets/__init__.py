"""Engines that the guard checks from outside, a file each.

Those with packages of their own run in a worker process.
"""
