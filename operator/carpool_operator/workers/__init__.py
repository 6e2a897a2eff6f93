"""A job's workers: their pods and Service, built and recognised; where they are, and how they ended.

Pure. It imports none of its siblings.
"""
