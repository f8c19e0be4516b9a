package main

import (
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	corev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/apis/resource"
	_ "k8s.io/kubernetes/pkg/apis/resource/install"
	"k8s.io/kubernetes/pkg/registry/resource/deviceclass"
	"k8s.io/kubernetes/pkg/registry/resource/resourceclaim"
	"k8s.io/kubernetes/pkg/registry/resource/resourceslice"
)

// Objects go through the API server's own code before the scheduler sees them: defaults are set, fields of disabled features
// are dropped, and the result is validated.

func createClass(ctx context.Context, class *resourceapi.DeviceClass) (*resourceapi.DeviceClass, error) {
	return create(ctx, "deviceclasses", deviceclass.Strategy, class, &resource.DeviceClass{}, &resourceapi.DeviceClass{})
}

func createSlice(ctx context.Context, slice *resourceapi.ResourceSlice) (*resourceapi.ResourceSlice, error) {
	return create(ctx, "resourceslices", resourceslice.Strategy, slice, &resource.ResourceSlice{}, &resourceapi.ResourceSlice{})
}

// namespaces answers that every namespace may have admin access.
type namespaces struct{ corev1.NamespaceInterface }

func (namespaces) Get(_ context.Context, name string, _ metav1.GetOptions) (*v1.Namespace, error) {
	labels := map[string]string{resourceapi.DRAAdminNamespaceLabelKey: "true"}
	return &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}, nil
}

func createClaim(ctx context.Context, claim *resourceapi.ResourceClaim) (*resourceapi.ResourceClaim, error) {
	uid := claim.UID
	// The strategy's authorizer is not asked for claims without a status.
	strategy := resourceclaim.NewStrategy(namespaces{}, nil)
	created, err := create(ctx, "resourceclaims", strategy, claim, &resource.ResourceClaim{}, &resourceapi.ResourceClaim{})
	if err != nil {
		return nil, err
	}
	created.UID = uid
	created.ResourceVersion = "1"
	return created, nil
}

type object interface {
	runtime.Object
	metav1.Object
}

func create[External object](
	ctx context.Context, kind string, strategy rest.RESTCreateStrategy, given External, internal object, stored External,
) (External, error) {
	var none External
	version := resourceapi.SchemeGroupVersion
	legacyscheme.Scheme.Default(given)
	if err := legacyscheme.Scheme.Convert(given, internal, nil); err != nil {
		return none, fmt.Errorf("%s %s: %w", kind, given.GetName(), err)
	}
	ctx = genericapirequest.WithNamespace(ctx, given.GetNamespace())
	ctx = genericapirequest.WithRequestInfo(ctx, &genericapirequest.RequestInfo{
		IsResourceRequest: true, Verb: "create",
		APIGroup: version.Group, APIVersion: version.Version, Resource: kind, Namespace: given.GetNamespace(),
	})
	rest.FillObjectMetaSystemFields(internal)
	if err := rest.BeforeCreate(strategy, ctx, internal); err != nil {
		return none, err
	}
	if err := legacyscheme.Scheme.Convert(internal, stored, nil); err != nil {
		return none, fmt.Errorf("%s %s: %w", kind, given.GetName(), err)
	}
	return stored, nil
}
