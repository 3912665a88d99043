"""The engine as a child process.

``__main__`` starts it, ``server`` owns its two sockets, ``verbs`` answers control messages, ``generate`` runs
requests, ``router`` dispatches experts, ``expert_server`` serves them, ``ring`` joins stages. Importing this package
loads nothing; ``client`` is the torch-free other end.
"""
