"""Executable graphs, as programs keep many of them: graphs.py COUNT NODES. Waits after each stage."""

from driver_api import NOTHING, Cuda, program, stage


def main(count, nodes):
    cuda = Cuda()
    nothing, stream = cuda.kernel(NOTHING, "sim_busy_0us"), cuda.stream()

    def launch():
        cuda.must_launch(nothing, stream=stream)

    launch()
    cuda.wait()
    stage("before", cuda)
    graphs = [cuda.captured(stream, launch, int(nodes)) for _ in range(int(count))]
    stage("instantiated", cuda)
    for graph in graphs:
        cuda.must("cuGraphLaunch", graph, stream)
    cuda.wait()
    stage("launched", cuda)


program(main)
