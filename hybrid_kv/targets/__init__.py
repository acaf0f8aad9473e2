"""Engines that the guard asks from outside, one file each; those with packages of their own run in a worker process."""
