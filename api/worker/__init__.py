"""Processes that claim jobs and plan; the only part of the service that loads torch.

    server
      └── nursery             loads torch once, computes nothing, forks and restarts workers
            ├── worker        claims a job, prolongs its lease, watches time and memory
            │     └── job     plans; dies with its worker, and takes its own processes along
            └── worker ...

A job runs in a process of its own, so that whatever a model does to it (memory, a crash in
compiled code, an endless loop) ends that job and nothing else. All of them are forks of one process
with one thread, which is what makes a fork safe and a start quick.

    supervisor  for the server: keeps a nursery running
    nursery     for ``python -m autoshard.api.worker``: keeps workers running
    loop        a worker
    child       a job's process, as the worker sees it
    body        a job's process from the inside; guard: what it may not touch
    task        from a request to a plan; problems: what can be wrong with it
    tree        processes below this one: their memory, and their end
"""
