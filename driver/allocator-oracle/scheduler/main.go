// Command scheduler answers which devices kube-scheduler would allocate for claims on one node: the scheduler's own code,
// without a cluster. It reads requests from standard input, one JSON object a line, and writes one answer a line.
//
//	{"classes": {"items": [DeviceClass...]}}                          replaces the cluster's classes
//	{"slices": {"node": "...", "items": [ResourceSlice...]}}          replaces all slices; claims stay. "labels" are the node's
//	{"allocate": {"claims": [ResourceClaim...]}}                      allocates the claims of one pod
//	{"release": {"claims": ["namespace/name"...]}}                    deletes claims
//	{"reset": {}}                                                     deletes all claims
//	{"metadata": {"file": "...", "claim": "...", "request": "..."}}   reads a container's file about its devices
//
// An answer is {}, {"allocations": [AllocationResult...]}, {"metadata": {"object": {...}, "path": "..."}}, {"unschedulable": "why"} or {"error": "what"}. With "forgetful":
// true in it, "allocate" allocates as on an empty node, and the claims are not kept.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"

	"k8s.io/klog/v2"
)

type request struct {
	Classes  *classesRequest  `json:"classes"`
	Slices   *slicesRequest   `json:"slices"`
	Allocate *allocateRequest `json:"allocate"`
	Release  *releaseRequest  `json:"release"`
	Reset    *struct{}        `json:"reset"`
	Metadata *metadataRequest `json:"metadata"`
}

type answer struct {
	Allocations   []allocation    `json:"allocations,omitempty"`
	Metadata      *metadataAnswer `json:"metadata,omitempty"`
	Unschedulable string          `json:"unschedulable,omitempty"`
	TimedOut      bool            `json:"timedOut,omitempty"`
	Error         string          `json:"error,omitempty"`
}

func main() {
	// Little stays alive from one request to the next.
	debug.SetGCPercent(1000)
	logger := klog.Background()
	ctx := klog.NewContext(context.Background(), logger)
	if err := serve(ctx, os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "scheduler:", err)
		os.Exit(1)
	}
}

func serve(ctx context.Context, in io.Reader, out io.Writer) error {
	cluster, err := newCluster(ctx)
	if err != nil {
		return err
	}
	lines := json.NewDecoder(bufio.NewReaderSize(in, 1<<20))
	lines.DisallowUnknownFields()
	buffered := bufio.NewWriterSize(out, 1<<20)
	answers := json.NewEncoder(buffered)
	for {
		var request request
		if err := lines.Decode(&request); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read a request: %w", err)
		}
		if err := answers.Encode(reply(ctx, cluster, request)); err != nil {
			return fmt.Errorf("write an answer: %w", err)
		}
		if err := buffered.Flush(); err != nil {
			return fmt.Errorf("write an answer: %w", err)
		}
	}
}

func reply(ctx context.Context, cluster *cluster, request request) answer {
	var result answer
	var err error
	switch {
	case request.Classes != nil:
		err = cluster.setClasses(ctx, request.Classes)
	case request.Slices != nil:
		err = cluster.setSlices(ctx, request.Slices)
	case request.Allocate != nil:
		result.Allocations, result.Unschedulable, err = cluster.allocate(ctx, request.Allocate)
	case request.Release != nil:
		err = cluster.release(request.Release)
	case request.Reset != nil:
		cluster.reset(ctx)
	case request.Metadata != nil:
		result.Metadata, err = readMetadata(request.Metadata)
	default:
		err = errors.New("a request must have one of classes, slices, allocate, release, reset, metadata")
	}
	if errors.Is(err, errTimedOut) {
		return answer{TimedOut: true}
	}
	if err != nil {
		return answer{Error: err.Error()}
	}
	return result
}
