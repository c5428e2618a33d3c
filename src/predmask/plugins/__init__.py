"""Plug-ins: the masks inside other trainers, without a fork of any."""
