package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/dynamicresources"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/feature"
	"k8s.io/kubernetes/pkg/scheduler/util/assumecache"
)

// filterTimeout is kube-scheduler's default of DynamicResourcesArgs.filterTimeout.
const filterTimeout = 10 * time.Second

var errTimedOut = errors.New("the allocator has searched for as long as the scheduler lets it search on one node")

type allocation = resourceapi.AllocationResult

type classesRequest struct {
	Items []resourceapi.DeviceClass `json:"items"`
}

type slicesRequest struct {
	Node   string                      `json:"node"`
	Labels map[string]string           `json:"labels"`
	Items  []resourceapi.ResourceSlice `json:"items"`
}

type allocateRequest struct {
	Claims    []resourceapi.ResourceClaim `json:"claims"`
	Forgetful bool                        `json:"forgetful"`
}

type releaseRequest struct {
	Claims []string `json:"claims"`
}

// cluster is what the DynamicResources plugin of the scheduler sees: claims through its own claim tracker and assume cache,
// with the features that this release enables by default.
type cluster struct {
	features  structured.Features
	factory   informers.SharedInformerFactory
	celCache  *cel.Cache
	node      *v1.Node
	slices    []*resourceapi.ResourceSlice
	manager   *dynamicresources.DefaultDRAManager
	claims    *assumecache.AssumeCache
	allocated map[string]*resourceapi.ResourceClaim
}

func newCluster(ctx context.Context) (*cluster, error) {
	// Nothing connects: the listers read what is put into their indexers.
	client, err := kubernetes.NewForConfig(&rest.Config{Host: "http://127.0.0.1:0"})
	if err != nil {
		return nil, fmt.Errorf("make a client: %w", err)
	}
	gates := feature.NewSchedulerFeaturesFromGates(utilfeature.DefaultFeatureGate)
	c := &cluster{
		features: dynamicresources.AllocatorFeatures(gates),
		factory:  informers.NewSharedInformerFactory(client, 0),
		// As in the plugin's New.
		celCache: cel.NewCache(10, cel.Features{
			EnableConsumableCapacity: gates.EnableDRAConsumableCapacity,
			EnableListTypeAttributes: gates.EnableDRAListTypeAttributes,
		}),
	}
	c.reset(ctx)
	return c, nil
}

// noInformer delivers nothing: claims are added with the assume cache's own functions for tests.
type noInformer struct{}

func (noInformer) AddEventHandler(cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error) {
	return nil, nil
}

func (c *cluster) reset(ctx context.Context) {
	c.claims = assumecache.NewAssumeCache(klog.FromContext(ctx), noInformer{}, "ResourceClaim", "", nil)
	c.manager = dynamicresources.NewDRAManager(ctx, c.claims, nil, c.factory)
	c.allocated = make(map[string]*resourceapi.ResourceClaim)
}

func (c *cluster) setClasses(ctx context.Context, request *classesRequest) error {
	indexer := c.factory.Resource().V1().DeviceClasses().Informer().GetIndexer()
	var stored []any
	for i := range request.Items {
		class, err := createClass(ctx, &request.Items[i])
		if err != nil {
			return err
		}
		stored = append(stored, class)
	}
	return indexer.Replace(stored, "1")
}

func (c *cluster) setSlices(ctx context.Context, request *slicesRequest) error {
	var stored []*resourceapi.ResourceSlice
	for i := range request.Items {
		slice, err := createSlice(ctx, &request.Items[i])
		if err != nil {
			return err
		}
		stored = append(stored, slice)
	}
	c.node = &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: request.Node, Labels: request.Labels}}
	c.slices = stored
	return nil
}

// allocate does for the claims of one pod what PreFilter, Filter, Reserve and PreBind of the plugin do.
func (c *cluster) allocate(ctx context.Context, request *allocateRequest) ([]allocation, string, error) {
	if c.node == nil {
		return nil, "", errors.New("no slices were published yet")
	}
	claims := make([]*resourceapi.ResourceClaim, 0, len(request.Claims))
	for i := range request.Claims {
		claim, err := createClaim(ctx, &request.Claims[i])
		if err != nil {
			return nil, "", err
		}
		if _, exists := c.allocated[key(claim)]; exists {
			return nil, "", fmt.Errorf("claim %s exists", key(claim))
		}
		claims = append(claims, claim)
	}

	// PreFilter
	state := &structured.AllocatedState{}
	if !request.Forgetful {
		var err error
		if state, err = c.manager.ResourceClaims().GatherAllocatedState(); err != nil {
			return nil, "", fmt.Errorf("gather allocation state: %w", err)
		}
	}
	allocator, err := structured.NewAllocator(ctx, c.features, *state, c.manager.DeviceClasses(), c.slices, c.celCache)
	if err != nil {
		return nil, "", err
	}
	// Filter
	ctx, cancel := context.WithTimeoutCause(ctx, filterTimeout, errTimedOut)
	defer cancel()
	results, err := allocator.Allocate(ctx, c.node, claims)
	if errors.Is(err, structured.ErrFailedAllocationOnNode) {
		return nil, err.Error(), nil
	}
	if err != nil {
		return nil, "", err
	}
	if len(results) != len(claims) {
		return nil, "cannot allocate all claims", nil
	}
	if !request.Forgetful {
		for i, claim := range claims {
			if err := c.store(claim, &results[i]); err != nil {
				return nil, "", err
			}
		}
	}
	return results, "", nil
}

// store does what Reserve and PreBind do: the claim is in flight, then written to the API server, then assumed.
func (c *cluster) store(claim *resourceapi.ResourceClaim, result *allocation) error {
	assumecache.AddTestObject(c.claims, claim)
	allocated := claim.DeepCopy()
	allocated.Status.Allocation = result.DeepCopy()
	tracker := c.manager.ResourceClaims()
	if err := tracker.SignalClaimPendingAllocation(claim.UID, allocated); err != nil {
		return err
	}
	allocated = allocated.DeepCopy()
	allocated.ResourceVersion = "2"
	if err := tracker.AssumeClaimAfterAPICall(allocated); err != nil {
		return err
	}
	tracker.MaybeRemoveClaimPendingAllocation(claim.UID, false)
	assumecache.UpdateTestObject(c.claims, allocated)
	c.allocated[key(claim)] = allocated
	return nil
}

func (c *cluster) release(request *releaseRequest) error {
	for _, name := range request.Claims {
		claim, ok := c.allocated[name]
		if !ok {
			return fmt.Errorf("claim %s does not exist", name)
		}
		assumecache.DeleteTestObject(c.claims, claim)
		delete(c.allocated, name)
	}
	return nil
}

func key(claim *resourceapi.ResourceClaim) string { return claim.Namespace + "/" + claim.Name }
