"""Figures of plans and sweeps: from plain values to pictures, one file each.

Every function takes the width in pixels that the picture is for, since a picture that is merely
shrunk cannot be read on a phone, and returns a :class:`~autoshard.drawing.scene.Scene`.
"""
