"""``python -m memsave_ext.check``: is every part of this build right on this machine, and how fast?

``kernels.py`` has the calls that are compared and timed, ``training.py`` tiny training runs,
``rows.py`` what a comparison says, and ``__main__.py`` the table.
"""
