"""kube-scheduler's requests over HTTPS: the four verbs, and how long an answer is worth holding back.

It imports `reservations` and all that those import, and `settings`.
"""
