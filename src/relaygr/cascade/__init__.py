"""Retrieval, pre-processing, and the pipeline that runs a request."""

from relaygr.cascade.catalogue import Catalogue
from relaygr.cascade.engine_ranking import EngineRanking
from relaygr.cascade.pipeline import (
    Pipeline,
    PipelineConfig,
    Recommendation,
    Recommended,
    RecommendRequest,
    StagesMs,
)
from relaygr.cascade.pre_processing import CANDIDATE_FEATURES, REQUEST_FEATURES, FeaturePreProcessing
from relaygr.cascade.retrieval import DelayedRetrieval, FaissRetrieval, FixedRetrieval, HttpRetrieval, IndexKind
from relaygr.cascade.stage import (
    FixedRanking,
    Offload,
    Prepared,
    PreProcessing,
    PreProcessingRequest,
    RankCall,
    Ranking,
    RankReply,
    Retrieval,
    RetrievalRequest,
    Retrieved,
    RiskTest,
    Signal,
    SignalCall,
    Stage,
    in_thread,
    inline,
)

__all__ = [
    "CANDIDATE_FEATURES",
    "REQUEST_FEATURES",
    "Catalogue",
    "DelayedRetrieval",
    "EngineRanking",
    "FaissRetrieval",
    "FeaturePreProcessing",
    "FixedRanking",
    "FixedRetrieval",
    "HttpRetrieval",
    "IndexKind",
    "Offload",
    "Pipeline",
    "PipelineConfig",
    "PreProcessing",
    "PreProcessingRequest",
    "Prepared",
    "RankCall",
    "RankReply",
    "Ranking",
    "RecommendRequest",
    "Recommendation",
    "Recommended",
    "Retrieval",
    "RetrievalRequest",
    "Retrieved",
    "RiskTest",
    "Signal",
    "SignalCall",
    "Stage",
    "StagesMs",
    "in_thread",
    "inline",
]
