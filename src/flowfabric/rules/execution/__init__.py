"""The life of one execution: create, claim, lease, finish, retry, cancel, expire, replay."""
