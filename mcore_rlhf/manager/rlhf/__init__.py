"""The pieces of the RLHF state; :mod:`mcore_rlhf.manager.state` puts them together and is what one imports from."""
