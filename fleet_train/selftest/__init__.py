"""``fleet_train selftest``: checks that a cluster does what training needs. Run it first on new machines.

Each rank is a *supervisor* (`supervisor`), which uses no device and none of Paddle's process groups. For every job
it starts one child, the *subject* (`subject`), which trains, communicates, or fails on purpose. So a rank can be
killed or stopped, while the supervisors observe how the others react.
"""
