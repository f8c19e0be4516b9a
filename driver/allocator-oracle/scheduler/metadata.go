package main

import (
	"encoding/json"
	"fmt"
	"strings"

	"k8s.io/dynamic-resource-allocation/api/metadata"
	metadatav1beta1 "k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/devicemetadata"
)

// metadataRequest is the content of a container's file about its devices (KEP-5304).
type metadataRequest struct {
	File string `json:"file"`
	// Where a program searches for it.
	Driver       string `json:"driver"`
	Claim        string `json:"claim"`
	PodClaimName string `json:"podClaimName"`
	Request      string `json:"request"`
}

type metadataAnswer struct {
	Object *metadatav1beta1.DeviceMetadata `json:"object"`
	Path   string                          `json:"path"`
}

// readMetadata reads the file as programs in containers do, with the validation of each version.
func readMetadata(request *metadataRequest) (*metadataAnswer, error) {
	decoder := json.NewDecoder(strings.NewReader(request.File))
	answer := metadataAnswer{Object: &metadatav1beta1.DeviceMetadata{}}
	var invalid error
	validate := devicemetadata.DecodeMetadataWithValidationResult(&invalid)
	if err := devicemetadata.DecodeMetadataFromStream(decoder, answer.Object, validate); err != nil {
		return nil, err
	}
	if invalid != nil {
		return nil, fmt.Errorf("invalid: %w", invalid)
	}
	if request.PodClaimName != "" {
		answer.Path = metadata.ResourceClaimTemplateFilePath(request.Driver, request.PodClaimName, request.Request)
	} else {
		answer.Path = metadata.ResourceClaimFilePath(request.Driver, request.Claim, request.Request)
	}
	return &answer, nil
}
